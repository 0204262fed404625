"""fastps.evaluation: a process beside a training that evaluates its newest weights, and may ask it to stop.

Border: it reads a job as any reader does, writes files, and sets one word of the job; no worker waits for it. Arrows: it
imports fastps.processes, fastps.telemetry, fastps.torch and what is below them. `import fastps` loads nothing of it.
"""

"""fastps.lab: what proves and measures fastps, and is not needed to train.

Border: `import fastps` and a training job load nothing of it. The command line, `fastps.bench`, an example and tests import it,
and nothing else does. Arrows: it imports every folder but these; papers imports virtual, measuring and demo, virtual imports
demo, and worlds imports gpus. `live_faults` disturbs a job that runs, and `stragglers` estimates what its slow workers cost.
"""

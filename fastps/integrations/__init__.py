"""fastps.integrations: what other training frameworks need to train with fastps, one file or folder a framework.

`process_group` is what they gather metrics with, and `attendance` what a worker does while it waits for the others there.
`publishing` is what their callbacks publish with, without an optimizer of fastps.
Border: a framework is imported only by its own file, which says which extra installs it. Arrows: it imports fastps.evaluation,
fastps.processes, fastps.torch and what is below them; nothing but the command line imports it.
"""

"""fastps.integrations: what other training frameworks need to train with fastps, one file a framework.

Border: a framework is imported only by its own file, which says which extra installs it. Arrows: it imports fastps.processes,
fastps.torch and what is below them; nothing but the command line imports it.
"""

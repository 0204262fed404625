"""fastps.integrations: what other training frameworks need to train with fastps, one file or folder a framework.

`process_group` is what they gather metrics with: `group_store` is where its workers meet, and `attendance` what one does while
it waits there. Border: a framework is imported only by its own file, which says which extra installs it. Arrows: it imports
fastps.processes, fastps.torch and what is below them; nothing but the command line imports it.
"""

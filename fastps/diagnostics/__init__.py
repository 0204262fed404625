"""fastps.diagnostics: checks of this machine, its GPUs and its links, for `fastps doctor`.

Border: it reports and repairs nothing. Arrows: it imports fastps.network, fastps.device and fastps.torch.
"""

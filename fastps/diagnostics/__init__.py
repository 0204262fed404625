"""fastps.diagnostics: checks of this machine and its GPUs, for `fastps doctor`.

Border: it reports and repairs nothing. Arrows: it imports fastps.store, fastps.device and fastps.torch.
"""

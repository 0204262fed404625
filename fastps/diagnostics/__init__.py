"""fastps.diagnostics: checks of this machine (doctor) and of the protocol (chaos, a simulated world with faults).

Border: it reports and repairs nothing. Arrows: it imports fastps.store, fastps.device and fastps.torch.
"""

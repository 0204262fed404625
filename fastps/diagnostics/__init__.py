"""fastps.diagnostics: what is wrong with this machine (doctor), or with the protocol (chaos, a simulated world with faults).

Border: it reports and mends nothing. Arrows: it imports fastps.store, fastps.device and fastps.torch.
"""

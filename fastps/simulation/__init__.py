"""fastps.simulation: jobs in virtual time, played by the same compiled scheduler as live jobs.

Border: it trains no model and shows nothing. Arrows: it imports fastps.job and fastps.system.
"""

"""fastps.advice: which discipline suits a job: replay of a trace under others, and sync="auto".

Border: it measures and recommends; it changes a job only through sync="auto". Arrows: it imports fastps.simulation,
fastps.tracing and fastps.store.
"""

"""What a fold must give: its reference in NumPy, and the jobs with which every build of it is compared."""

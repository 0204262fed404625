"""fastps.kernels: everything compiled. Knows memory and numbers; knows no process, file, torch or policy name."""

if __name__ != "fastps.kernels":
    raise ImportError(
        f"this folder installs as the package fastps.kernels and cannot be imported as {__name__!r}: "
        "use `import fastps.kernels`, after `pip install -e .`"
    )

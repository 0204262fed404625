"""fastps.kernels: everything compiled. Knows memory and numbers; knows no process, file or policy name, and but for
torch_tensors no torch.
"""

if __name__ != "fastps.kernels":
    raise ImportError(
        f"this folder installs as the package fastps.kernels and cannot be imported as {__name__!r}: "
        "use `import fastps.kernels`, after `pip install -e .`; where another package looks for one of this name,"
        " as transformers does, start Python in another folder, or as `python -P`"
    )

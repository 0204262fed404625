"""What torch calls when it is imported, because pyproject.toml names it as a backend. If this failed, `import torch` would."""

import warnings


def register() -> None:
    """Make `torch.distributed.init_process_group("fastps")` known, or warn why it is not."""
    try:
        from fastps.collectives import backend

        backend.register()
    except Exception as error:  # a folder or file named fastps that hides the package, a half-removed installation
        warnings.warn(f'torch.distributed has no backend "fastps": {type(error).__name__}: {error}', stacklevel=2)

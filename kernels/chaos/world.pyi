from typing import Any

class World:
    def run(self, seed: int, **job: Any) -> dict[str, Any]: ...

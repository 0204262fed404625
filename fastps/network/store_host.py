"""The store in which the nodes meet, in a process of its own, for launchers that keep none.

Worker 0 of the job runs this module. The process ends when standard input does: its writing end is open in worker 0 and in the
agent of node 0, so the store lasts as long as either.
"""

import argparse
import json
import os
import sys
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fastps.errors import AttachError, Error, UsageError
from fastps.network.addresses import is_here
from fastps.network.awaiting import await_name
from fastps.network.gloo import reason_of
from fastps.system.descriptors import reserve_all


def main() -> int:
    """Open the store, print one line of JSON, and keep the store until standard input ends."""
    limit_name_lookups()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    given = parser.parse_args()
    reserve_all()  # torch's store takes a connection of anybody
    try:
        store = _open(given.host, given.port, given.timeout)
    except Error as error:
        print(json.dumps({"error": str(error), "kind": type(error).__name__}), flush=True)
        return 1
    print("{}", flush=True)
    sys.stdin.read()
    del store
    return 0


def limit_name_lookups() -> None:
    """Let this process wait for a name server for a second at most. Call it before the first lookup.

    torch's store looks up the name of every client, and answers nobody meanwhile. Under glibc's defaults a name server that
    does not answer would stop it for 10 s, longer than a lost edge may take to open again.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def _open(host: str, port: int, timeout_s: float) -> TCPStore:
    await_name(host, timeout_s)
    if not is_here(host):
        raise AttachError(
            f"worker 0 keeps the rendezvous of all nodes, and {host} is not an address of its machine: expected the host of"
            " worker 0 in FASTPS_RENDEZVOUS=HOST:PORT"
        )
    try:
        return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise UsageError(
            f"node 0 cannot listen on port {port}: {reason_of(error)}; end what uses the port, or give another"
        ) from error


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # skip the exit handlers of torch, which take long

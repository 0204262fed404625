"""Torch's Hogwild example with fastps: workers that do not wait for each other, and whose updates are all applied.

python examples/hogwild_mnist/main.py
fastps run -n 2 examples/hogwild_mnist/main.py
torchrun --standalone --nproc-per-node 2 examples/hogwild_mnist/main.py
"""

import sys
import time

import torch
from task import images, network, parser, report, train

import fastps


def main() -> None:
    """Train as one of the workers; worker 0 waits for the others and tests the model."""
    options = parser(__doc__)
    options.add_argument("--sync", default="asp", help="any discipline of fastps; asp waits for nobody, as Hogwild")
    arguments = options.parse_args()
    to_train, to_test = images(arguments)
    model = network(arguments.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=arguments.momentum)
    with fastps.DistributedOptimizer(optimizer, arguments.sync, model=model) as optimizer:
        optimizer.wait_for_start()
        began = time.perf_counter()
        train(fastps.rank(), arguments, model, optimizer, to_train)
        if fastps.rank() == 0:
            optimizer.wait_for_others()  # takes the final weights
            report(model, to_test, time.perf_counter() - began, arguments.json, updates=optimizer.version)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)

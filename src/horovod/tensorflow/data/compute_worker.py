"""The workers of a `tf.data` service: `horovodrun -np 4 python -m horovod.tensorflow.data.compute_worker FILE`"""

import argparse

from hora.tensorflow.data_service import serve


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: int) -> None:
    """Run this rank of the compute job until the service is shut down."""
    serve(configfile, dispatchers, dispatcher_side, timeout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configfile", help="where rank 0 writes the addresses and the key of the service")
    parser.add_argument("--dispatchers", type=int, default=1, help="how many dispatchers there are")
    parser.add_argument("--dispatcher-side", default="compute", choices=["compute", "training"], help="who runs them")
    parser.add_argument("--timeout", type=int, default=60, help="seconds that each part waits for the others")
    given = parser.parse_args()
    main(given.dispatchers, given.dispatcher_side, given.configfile, given.timeout)

"""`python -m benchmarks`: the whole comparison."""

from benchmarks.run import main

main()

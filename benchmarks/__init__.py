"""One file per promise, each printing ratios taken in one run. `make bench`, or
`python -m benchmarks NAME…`; what it compares with and finds missing it names and leaves out."""

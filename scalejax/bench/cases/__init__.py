"""The benchmarks of `scalejax bench`, one file each."""

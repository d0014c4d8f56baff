"""The commands of `scalejax`, one file each."""

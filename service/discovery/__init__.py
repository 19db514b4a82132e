"""5 fleet, where workers come from: files, DNS, Kubernetes and the admin API, as one wanted set.

Read desired.py for the merge, following.py for how a source is followed, then one source.
"""

"""`serve-llm check`: can these hosts serve together? One node per host; node 0, the master, leads and judges.

host        what a host says of itself             join        who takes part, and why someone does not
probe       connections between two hosts          collective  all-reduce over all hosts, gloo and NCCL
findings    from all of that to causes and remedies (pure)     table   as text
"""

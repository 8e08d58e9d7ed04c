"""Test oracles: what each kernel must compute, as plainly as possible. Tests compare the fast versions with these."""

"""The parts of `bench.simulate`, a discrete-event simulator of many engines behind the real router and admission."""

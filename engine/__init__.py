"""Action: ledger commands, samplers, pumps, data plane, generator, trainer, checkpoints and restore."""

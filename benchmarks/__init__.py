"""Measurements behind docs/benchmarks.md: ``python -m benchmarks.run --list`` names them.

Each benchmark is a module with ``run(quick) -> Result``; it is run in a process of its own, leaves one JSON file in
``benchmarks/results/``, and docs/benchmarks.md is written from those files alone.
"""

"""The orchestrator's loops: asyncio tasks with one job each, over a scheduler that decides."""

"""Measuring a draft head: paired runs, losslessness, cost model, advice, report. Nothing here is imported by the other folders."""

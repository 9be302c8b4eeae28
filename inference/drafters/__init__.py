"""Drafters: who proposes. One file each; the contract is `base.Drafter`."""

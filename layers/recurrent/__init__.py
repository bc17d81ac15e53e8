"""Recurrent and state-space layers."""

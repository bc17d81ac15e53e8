"""Reading the text of a compiled program (HLO)."""

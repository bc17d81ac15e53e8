"""Settings of a run that experiments choose: data and validation only."""

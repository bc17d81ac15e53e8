"""Speech: features of audio, CTC, and the layers of the Conformer."""

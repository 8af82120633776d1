"""Who is told about a run: the sinks, behind one Protocol, and which of them a run has."""

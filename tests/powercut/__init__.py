"""Power-cut rigs: a disk that can be cut (loopfs), and one that records its writes (recorder, replay)."""

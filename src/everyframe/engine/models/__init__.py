"""Models without a run: fetch them, compile them, save them with merged or quantized weights."""

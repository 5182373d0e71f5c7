"""Whole groups in, batch log, optimizer step, new weights out.

I/O process (no torch):  io_process -> intake, batch_log      rank 0 and further ranks (torch):  loop -> trainer, checkpoint
"""

"""The reliable tier beside the manager: it decides and keeps what is committed. No torch."""

"""Machines of Azure as a provider; nothing here imports Azure's SDK before a call needs it."""

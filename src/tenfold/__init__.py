"""Tenfold: pretrain language models far larger than the machine. Share layers, delink them, train on."""

__version__ = "0.1.0"

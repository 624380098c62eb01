"""The coordinator's decisions: routing, control fan-out, when to switch.  No sockets, no SGLang, no clock."""

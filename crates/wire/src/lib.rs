//! MongoDB wire protocol: framing, messages, compression, command view, SCRAM.

//! Control messages between the host and the guest agent.

//! What the mock worker, the load generator and the bare relay share. Standard library only.

pub mod args;
pub mod check;
pub mod engine;
pub mod http;
pub mod render;
pub mod sys;

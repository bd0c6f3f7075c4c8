//! Tests of the core from outside. Expected values are written by hand or come from `tests/oracle`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that unwraps an error fails, as it should"
)]

mod claims;
mod formats;
mod golden;
mod memory;
mod models;
mod planner;
mod plans;
mod reasons;
mod regions;
mod support;
mod verdicts;

//! Helpers of the tests of the whole project; today the runner of filetests.

pub mod filetest;

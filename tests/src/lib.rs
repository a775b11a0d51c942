//! What the tests of the whole project share; today the runner of filetests.

pub mod filetest;

//! The native part of the Python package `mlcc`. The public part is in `python/mlcc`; this is `mlcc._mlcc`.
//!
//! No thread of ours ever takes the GIL: engines and servers put their messages into channels ([`stream`]) or
//! mailboxes ([`mailbox`]), and threads of Python take it from there. So an interpreter may shut down while
//! texts are written.

mod adapters;
mod core;
mod errors;
mod exchange;
mod floats;
mod inspect;
mod load;
mod mailbox;
mod options;
mod pieces;
mod process;
mod session;
mod stream;

#[pyo3::pymodule]
mod _mlcc {
    #[pymodule_export]
    use crate::{
        core::Core,
        exchange::{Answer, Exchange},
        floats::Floats,
        mailbox::{Mailbox, Pending},
        pieces::{Finished, Logprob, Piece},
        session::Session,
        stream::Stream,
    };
}

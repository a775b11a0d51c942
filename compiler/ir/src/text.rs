//! The text form of modules (`.mlc`): one lexer, and a printer and a parser for each level of the IR.
//!
//! Printing is exact: `parse(print(x))` prints identically. Names are made unique when printing; floats are
//! written so that they read back as the same bits.

pub mod dim;
pub mod graph_parse;
pub mod graph_print;
pub mod kernel_parse;
pub mod kernel_print;
pub mod lexer;
pub mod module;
mod scanner;
pub mod step;

pub use dim::parse_dim;
pub use graph_print::{node_label, print_function, print_nodes};
pub use kernel_parse::parse_kernel;
pub use kernel_print::print_kernel;
pub use lexer::{LexToken, Lexer, ParseError, TextPosition, print_name, print_string};
pub use module::{one_of, parse_module, parse_module_part, print_module};
pub use step::{
    parse_buffer, parse_parts, parse_schedule, parse_step, print_buffer, print_parts, print_schedule,
    print_step,
};

#[cfg(test)]
mod tests;

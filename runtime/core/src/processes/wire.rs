//! Messages of rank 0 as bytes: a kind, then numbers of eight bytes and lists.

use mlcc_abi::{EntryForm, EntryPoint};

/// The kind of a message, with the numbers that follow; places are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RankMessageKind {
    /// Nothing more comes.
    End,
    /// Nothing is wanted but a sign.
    Heartbeat,
    /// A step (see `RankLeader::step`).
    Step,
    /// A state, of a sequence that begins: its number.
    CreateState,
    /// The sequence has ended: its number.
    FreeState,
    /// Two numbers: from, to.
    CopyState,
    /// Rank, number, place, and the bytes.
    WriteState,
    /// Rank, number, place, how many.
    ReadState,
    /// Rank, place, and the bytes.
    WritePages,
    /// Rank, place, how many.
    ReadPages,
    /// Rank, from, to, how many.
    CopyPages,
    /// Pages may lose their memory: from, to.
    DecommitPages,
    /// Pages get memory: from, to. On GPUs, where it does not come by itself.
    CommitPages,
    /// Pages of a sequence, on GPUs: its number, how many are as they were, and those behind.
    PageTable,
    /// Slots for adapters: place, and the bytes.
    WriteSlots,
}

impl RankMessageKind {
    const ALL: [RankMessageKind; 15] = [
        RankMessageKind::End,
        RankMessageKind::Heartbeat,
        RankMessageKind::Step,
        RankMessageKind::CreateState,
        RankMessageKind::FreeState,
        RankMessageKind::CopyState,
        RankMessageKind::WriteState,
        RankMessageKind::ReadState,
        RankMessageKind::WritePages,
        RankMessageKind::ReadPages,
        RankMessageKind::CopyPages,
        RankMessageKind::DecommitPages,
        RankMessageKind::CommitPages,
        RankMessageKind::PageTable,
        RankMessageKind::WriteSlots,
    ];
}

/// The number of a step that ranks take together; `None` for one that each can take alone.
pub(crate) fn step_number(step: EntryPoint) -> Option<u64> {
    (step.kind() != EntryForm::Rows).then_some(step as u64)
}

/// A message that is being written; its memory stays for the next one.
#[derive(Default)]
pub(crate) struct MessageWriter(Vec<u8>);

impl MessageWriter {
    pub fn start_message(&mut self, kind: RankMessageKind) -> &mut MessageWriter {
        self.0.clear();
        self.0.push(kind as u8);
        self
    }

    pub fn push_number(&mut self, number: u64) -> &mut MessageWriter {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    /// Appends the number of values, and the values.
    pub fn push_list(&mut self, values: &[i32]) -> &mut MessageWriter {
        self.push_number(values.len() as u64);
        values.iter().for_each(|value| self.0.extend_from_slice(&value.to_le_bytes()));
        self
    }

    /// The last of a message.
    pub fn push_bytes(&mut self, bytes: &[u8]) -> &mut MessageWriter {
        self.0.extend_from_slice(bytes);
        self
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A message that has come. `None` where it ends too early.
pub(crate) struct MessageReader<'a>(&'a [u8]);

impl<'a> MessageReader<'a> {
    /// The kind, and what follows.
    pub fn new(bytes: &'a [u8]) -> Option<(RankMessageKind, MessageReader<'a>)> {
        let (&kind, rest) = bytes.split_first()?;
        Some((*RankMessageKind::ALL.get(kind as usize)?, MessageReader(rest)))
    }

    pub fn read_number(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*number))
    }

    pub fn read_numbers<const N: usize>(&mut self) -> Option<[u64; N]> {
        let mut numbers = [0; N];
        for number in &mut numbers {
            *number = self.read_number()?;
        }
        Some(numbers)
    }

    pub fn read_step(&mut self) -> Option<EntryPoint> {
        let number = self.read_number()?;
        EntryPoint::all().find(|&step| step_number(step) == Some(number))
    }

    /// Adds the values of a list; says how many.
    pub fn read_list(&mut self, to: &mut Vec<i32>) -> Option<usize> {
        let count = self.read_number()? as usize;
        let (values, rest) = self.0.split_at_checked(count.checked_mul(4)?)?;
        to.extend(values.as_chunks::<4>().0.iter().map(|value| i32::from_le_bytes(*value)));
        self.0 = rest;
        Some(count)
    }

    pub fn remaining_bytes(self) -> &'a [u8] {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_back() {
        let mut message = MessageWriter::default();
        for kind in RankMessageKind::ALL {
            message
                .start_message(kind)
                .push_number(3)
                .push_list(&[1, -2, i32::MAX])
                .push_number(u64::MAX)
                .push_list(&[])
                .push_bytes(b"end");
            let (found, mut reader) = MessageReader::new(message.bytes()).unwrap();
            let mut list = vec![9];
            assert_eq!((found, reader.read_number(), reader.read_list(&mut list)), (kind, Some(3), Some(3)));
            assert_eq!((reader.read_numbers(), reader.read_list(&mut list)), (Some([u64::MAX]), Some(0)));
            assert_eq!((&list[..], reader.remaining_bytes()), (&[9, 1, -2, i32::MAX][..], &b"end"[..]));
        }
        for step in EntryPoint::all().filter(|step| step.kind() != EntryForm::Rows) {
            message.start_message(RankMessageKind::Step).push_number(step_number(step).unwrap());
            assert_eq!(MessageReader::new(message.bytes()).and_then(|(_, mut r)| r.read_step()), Some(step));
        }
        assert_eq!(step_number(EntryPoint::Softmax), None);
        message.start_message(RankMessageKind::Step).push_number(EntryPoint::Softmax as u64);
        assert_eq!(MessageReader::new(message.bytes()).and_then(|(_, mut r)| r.read_step()), None);
    }

    #[test]
    fn short_messages_are_refused() {
        let mut message = MessageWriter::default();
        message.start_message(RankMessageKind::Step).push_list(&[1, 2, 3]);
        for len in 0..message.bytes().len() {
            let read = MessageReader::new(&message.bytes()[..len])
                .and_then(|(_, mut r)| r.read_list(&mut Vec::new()));
            assert_eq!(read, None, "{len} bytes");
        }
        assert!(MessageReader::new(&[77]).is_none());
        message.start_message(RankMessageKind::Step).push_number(u64::MAX);
        assert_eq!(MessageReader::new(message.bytes()).unwrap().1.read_list(&mut Vec::new()), None);
    }
}

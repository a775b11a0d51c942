//! `tokenizer.model`: the protobuf message `ModelProto` of sentencepiece (`sentencepiece_model.proto`),
//! reading only the fields that encoding needs. The wire format is a list of (field number, wire type,
//! value).

use std::fmt;

/// Types of a piece as the file numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PieceKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl PieceKind {
    /// The same numbers are used by GGUF's `tokenizer.ggml.token_type`.
    pub fn from_number(number: u64) -> Option<PieceKind> {
        Some(match number {
            1 => PieceKind::Normal,
            2 => PieceKind::Unknown,
            3 => PieceKind::Control,
            4 => PieceKind::UserDefined,
            5 => PieceKind::Unused,
            6 => PieceKind::Byte,
            _ => return None,
        })
    }

    pub fn number(self) -> u64 {
        match self {
            PieceKind::Normal => 1,
            PieceKind::Unknown => 2,
            PieceKind::Control => 3,
            PieceKind::UserDefined => 4,
            PieceKind::Unused => 5,
            PieceKind::Byte => 6,
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct ProtoPiece {
    pub text: String,
    pub score: f32,
    pub kind: PieceKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelType {
    Unigram,
    Bpe,
}

/// The message with its defaults filled in.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelProto {
    pub pieces: Vec<ProtoPiece>,
    pub model_type: ModelType,
    pub byte_fallback: bool,
    pub treat_whitespace_as_suffix: bool,
    pub bos_piece: String,
    pub eos_piece: String,
    pub charsmap: Vec<u8>,
    pub add_dummy_prefix: bool,
    pub remove_extra_whitespaces: bool,
    pub escape_whitespaces: bool,
}

impl Default for ModelProto {
    fn default() -> Self {
        ModelProto {
            pieces: Vec::new(),
            model_type: ModelType::Unigram,
            byte_fallback: false,
            treat_whitespace_as_suffix: false,
            bos_piece: "<s>".to_owned(),
            eos_piece: "</s>".to_owned(),
            charsmap: Vec::new(),
            add_dummy_prefix: true,
            remove_extra_whitespaces: true,
            escape_whitespaces: true,
        }
    }
}

/// The fault, for [`super::super::TokenizerError::SentencePiece`].
type ProtoReason = String;

impl ModelProto {
    pub fn parse(bytes: &[u8]) -> Result<ModelProto, ProtoReason> {
        let mut model = ModelProto::default();
        for field in WireFields(bytes) {
            match field? {
                (1, WireValue::Bytes(piece)) => {
                    let number = model.pieces.len();
                    model.pieces.push(parse_piece(piece).map_err(|e| format!("piece {number}: {e}"))?);
                }
                (2, WireValue::Bytes(spec)) => {
                    model.parse_trainer(spec).map_err(|e| format!("trainer_spec: {e}"))?
                }
                (3, WireValue::Bytes(spec)) => {
                    model.parse_normalizer(spec).map_err(|e| format!("normalizer_spec: {e}"))?
                }
                _ => {}
            }
        }
        Ok(model)
    }

    fn parse_trainer(&mut self, bytes: &[u8]) -> Result<(), ProtoReason> {
        for field in WireFields(bytes) {
            match field? {
                (3, WireValue::Varint(number)) => {
                    self.model_type = match number {
                        1 => ModelType::Unigram,
                        2 => ModelType::Bpe,
                        3 => {
                            return Err(
                                "models of type WORD are not supported, only UNIGRAM and BPE".to_owned()
                            );
                        }
                        4 => {
                            return Err(
                                "models of type CHAR are not supported, only UNIGRAM and BPE".to_owned()
                            );
                        }
                        other => return Err(format!("model_type is {other}")),
                    }
                }
                (24, WireValue::Varint(flag)) => self.treat_whitespace_as_suffix = flag != 0,
                (35, WireValue::Varint(flag)) => self.byte_fallback = flag != 0,
                (46, WireValue::Bytes(name)) => self.bos_piece = text(name)?,
                (47, WireValue::Bytes(name)) => self.eos_piece = text(name)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn parse_normalizer(&mut self, bytes: &[u8]) -> Result<(), ProtoReason> {
        for field in WireFields(bytes) {
            match field? {
                (2, WireValue::Bytes(map)) => self.charsmap = map.to_vec(),
                (3, WireValue::Varint(flag)) => self.add_dummy_prefix = flag != 0,
                (4, WireValue::Varint(flag)) => self.remove_extra_whitespaces = flag != 0,
                (5, WireValue::Varint(flag)) => self.escape_whitespaces = flag != 0,
                _ => {}
            }
        }
        Ok(())
    }

    /// The message in its wire format; [`ModelProto::parse`] reads it back. For vocabularies of other files
    /// (GGUF).
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for piece in &self.pieces {
            let mut message = Vec::new();
            write_bytes(&mut message, 1, piece.text.as_bytes());
            write_varint(&mut message, 2 << 3 | 5);
            message.extend_from_slice(&piece.score.to_le_bytes());
            write_number(&mut message, 3, piece.kind.number());
            write_bytes(&mut out, 1, &message);
        }
        let mut trainer = Vec::new();
        write_number(&mut trainer, 3, if self.model_type == ModelType::Unigram { 1 } else { 2 });
        write_number(&mut trainer, 24, self.treat_whitespace_as_suffix.into());
        write_number(&mut trainer, 35, self.byte_fallback.into());
        write_bytes(&mut trainer, 46, self.bos_piece.as_bytes());
        write_bytes(&mut trainer, 47, self.eos_piece.as_bytes());
        write_bytes(&mut out, 2, &trainer);
        let mut normalizer = Vec::new();
        write_bytes(&mut normalizer, 2, &self.charsmap);
        write_number(&mut normalizer, 3, self.add_dummy_prefix.into());
        write_number(&mut normalizer, 4, self.remove_extra_whitespaces.into());
        write_number(&mut normalizer, 5, self.escape_whitespaces.into());
        write_bytes(&mut out, 3, &normalizer);
        out
    }
}

fn parse_piece(bytes: &[u8]) -> Result<ProtoPiece, ProtoReason> {
    let mut piece = ProtoPiece { text: String::new(), score: 0.0, kind: PieceKind::Normal };
    for field in WireFields(bytes) {
        match field? {
            (1, WireValue::Bytes(name)) => piece.text = text(name)?,
            (2, WireValue::Fixed32(bits)) => piece.score = f32::from_bits(bits),
            (3, WireValue::Varint(number)) => {
                piece.kind = PieceKind::from_number(number).ok_or_else(|| format!("its type is {number}"))?;
            }
            _ => {}
        }
    }
    if piece.text.is_empty() {
        return Err("it has no text".to_owned());
    }
    if !piece.score.is_finite() {
        return Err(format!("its score is {}", piece.score));
    }
    Ok(piece)
}

fn text(bytes: &[u8]) -> Result<String, ProtoReason> {
    std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| "a text is not UTF-8".to_owned())
}

enum WireValue<'a> {
    Varint(u64),
    Fixed32(u32),
    Fixed64,
    Bytes(&'a [u8]),
}

impl fmt::Debug for WireValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WireValue::Varint(number) => write!(f, "{number}"),
            WireValue::Fixed32(bits) => write!(f, "{bits:#x}"),
            WireValue::Fixed64 => write!(f, "64 bits"),
            WireValue::Bytes(bytes) => write!(f, "{} bytes", bytes.len()),
        }
    }
}

/// The fields of one message, in order. After an error the iterator ends.
struct WireFields<'a>(&'a [u8]);

impl<'a> Iterator for WireFields<'a> {
    type Item = Result<(u64, WireValue<'a>), ProtoReason>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.0 = &[];
        }
        Some(
            field.ok_or_else(|| {
                "it ends in the middle of a field, or has a field of an unknown type".to_owned()
            }),
        )
    }
}

impl<'a> WireFields<'a> {
    fn field(&mut self) -> Option<(u64, WireValue<'a>)> {
        let key = self.varint()?;
        let value = match key & 7 {
            0 => WireValue::Varint(self.varint()?),
            1 => {
                self.take(8)?;
                WireValue::Fixed64
            }
            2 => {
                let length = usize::try_from(self.varint()?).ok()?;
                WireValue::Bytes(self.take(length)?)
            }
            5 => WireValue::Fixed32(u32::from_le_bytes(self.take(4)?.try_into().ok()?)),
            _ => return None,
        };
        Some((key >> 3, value))
    }

    /// Seven bits a byte, low ones first.
    fn varint(&mut self) -> Option<u64> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }
}

fn write_varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn write_number(out: &mut Vec<u8>, field: u64, number: u64) {
    write_varint(out, field << 3);
    write_varint(out, number);
}

fn write_bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    write_varint(out, field << 3 | 2);
    write_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

//! A kernel that can be executed, and the module that it is from.

use std::sync::Arc;

use super::PtxError;
use super::decode::decode;
use super::op::{PtxInst, PtxOp};
use super::scope::{FunctionScope, RegisterClass, RegisterDeclaration, SharedArray};
use super::text::{PtxFunction, PtxItem, PtxModule, read};

/// The PTX text of a module, by lines.
#[derive(Debug)]
pub struct PtxSource {
    text: String,
    starts: Vec<usize>,
}

impl PtxSource {
    fn new(text: &str) -> Self {
        let starts = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
        Self { text: text.to_string(), starts }
    }

    /// Line `number`, counted from 1, without blanks around it.
    pub fn line(&self, number: u32) -> &str {
        let Some(index) = (number as usize).checked_sub(1) else { return "" };
        let Some(&begin) = self.starts.get(index) else { return "" };
        let end = self.starts.get(index + 1).map_or(self.text.len(), |end| end - 1);
        self.text[begin..end].trim()
    }
}

#[derive(Debug)]
pub struct PtxKernel {
    pub name: String,
    pub source: Arc<PtxSource>,
    pub code: Vec<PtxInst>,
    /// Offset and bytes of every parameter.
    pub params: Vec<(u32, u32)>,
    pub param_bytes: u32,
    pub max_threads: Option<[u32; 3]>,
    pub words: u32,
    pub doubles: u32,
    pub preds: u32,
    /// Values of constants, each once.
    pub word_constants: Vec<u32>,
    pub double_constants: Vec<u64>,
    pub ranges: Vec<RegisterDeclaration>,
    pub shared: Vec<SharedArray>,
    pub shared_end: u32,
    /// Bytes of local memory of a thread.
    pub local_bytes: u32,
}

/// The program that was loaded from one text.
#[derive(Debug)]
pub struct PtxProgram {
    pub version: u32,
    pub sm: u32,
    pub exact: bool,
    pub kernels: Vec<Arc<PtxKernel>>,
}

/// Reads a PTX text. Every instruction of every kernel has to be known.
pub fn load(text: &str) -> Result<PtxProgram, PtxError> {
    let module = read(text)?;
    let source = Arc::new(PtxSource::new(text));
    let kernels = module.functions.iter().map(|f| Ok(Arc::new(kernel(&module, f, &source)?)));
    let kernels = kernels.collect::<Result<_, PtxError>>()?;
    Ok(PtxProgram { version: module.version, sm: module.sm, exact: module.exact, kernels })
}

fn kernel(
    module: &PtxModule<'_>,
    function: &PtxFunction<'_>,
    source: &Arc<PtxSource>,
) -> Result<PtxKernel, PtxError> {
    let mut line = 0;
    code(module, function, &mut line)
        .map(|(code, scope)| finish(function, source, code, scope))
        .map_err(|what| PtxError { line, what: format!("kernel {}: {what}", function.name) })
}

fn code<'a>(
    module: &PtxModule<'a>,
    function: &PtxFunction<'a>,
    line: &mut u32,
) -> Result<(Vec<PtxInst>, FunctionScope<'a>), String> {
    let mut scope = FunctionScope::new(function, &module.shared)?;
    let mut code = vec![];
    for item in &function.body {
        match item {
            PtxItem::Register { ty, name, count } => scope.declare(ty, name, *count)?,
            PtxItem::Open => scope.open(),
            PtxItem::Close => scope.close(),
            PtxItem::Shared(_) | PtxItem::Local(_) | PtxItem::Label(_) => {}
            PtxItem::Statement(statement) => {
                *line = statement.line;
                let guard = match statement.guard {
                    Some((name, negated)) => Some((scope.pred(name)?, negated)),
                    None => None,
                };
                let op = decode(&mut scope, statement)?;
                code.push(PtxInst { op, guard, line: *line });
            }
        }
    }
    // A body may end without `ret`; a label may be at its end.
    code.push(PtxInst { op: PtxOp::Ret, guard: None, line: *line });
    Ok((code, scope))
}

fn finish(
    function: &PtxFunction<'_>,
    source: &Arc<PtxSource>,
    code: Vec<PtxInst>,
    scope: FunctionScope<'_>,
) -> PtxKernel {
    let mut params = vec![];
    let mut offset = 0u32;
    for param in &function.params {
        offset = offset.next_multiple_of(param.align);
        params.push((offset, param.bytes));
        offset += param.bytes;
    }
    let count = |class| scope.counts.get(&class).copied().unwrap_or(0);
    PtxKernel {
        name: function.name.to_string(),
        source: Arc::clone(source),
        code,
        params,
        param_bytes: offset,
        max_threads: function.max_threads,
        words: count(RegisterClass::Word),
        doubles: count(RegisterClass::Double),
        preds: count(RegisterClass::Pred),
        word_constants: scope.words,
        double_constants: scope.doubles,
        ranges: scope.ranges,
        shared: scope.shared,
        shared_end: scope.shared_end,
        local_bytes: scope.local_end,
    }
}

impl PtxKernel {
    /// The name of a register, for messages.
    pub fn register(&self, class: RegisterClass, number: u32) -> String {
        let holds = |r: &&RegisterDeclaration| {
            r.class == class && (r.first..r.first + r.count.unwrap_or(1)).contains(&number)
        };
        match self.ranges.iter().find(holds) {
            Some(range) if range.count.is_some() => format!("{}{}", range.name, number - range.first),
            Some(range) => range.name.clone(),
            None => "a register".into(),
        }
    }
}

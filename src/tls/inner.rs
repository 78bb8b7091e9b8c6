//! The inner transport, which carries the ciphertext. It is either one of grapeshot's own transports, whose `write`
//! and abort are called directly, or any other object with the methods of `asyncio.Transport`. If a program has
//! replaced methods on one of our transports or on its type, that transport is called like any other object:
//! `transport.write = f` takes effect from the next write on.

use std::cell::Cell;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::{has_own_methods, is_tls, lifecycle, tls_of, writing};
use crate::binding::object_cell::ObjectCell;
use crate::transports::stream;

#[derive(Clone, Copy, PartialEq, Eq)]
enum InnerKind {
    Stream,
    Tls,
    Foreign,
}

pub(super) struct Inner {
    transport: ObjectCell,
    kind: Cell<InnerKind>,
}

impl Inner {
    /// No transport yet.
    pub(super) const fn none() -> Self {
        Self {
            transport: ObjectCell::empty(),
            kind: Cell::new(InnerKind::Foreign),
        }
    }

    pub(super) fn set(&self, transport: &Bound<'_, PyAny>) {
        self.kind.set(if stream::is_stream(transport) {
            InnerKind::Stream
        } else if is_tls(transport) {
            InnerKind::Tls
        } else {
            InnerKind::Foreign
        });
        self.transport.set(transport.clone());
    }

    pub(super) fn get<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.transport.get(py)
    }

    pub(super) fn take<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.transport.take(py)
    }

    /// False for a transport of another library, about which nothing is known.
    pub(super) fn is_ours(&self) -> bool {
        self.kind.get() != InnerKind::Foreign
    }

    /// The way in which `transport` must be called now.
    #[inline]
    fn direct(&self, transport: &Bound<'_, PyAny>) -> InnerKind {
        match self.kind.get() {
            InnerKind::Stream if stream::has_own_methods(transport) => InnerKind::Stream,
            InnerKind::Tls if has_own_methods(transport) => InnerKind::Tls,
            _ => InnerKind::Foreign,
        }
    }

    /// Calls `write(data)`. Without a transport the data is lost.
    #[inline]
    pub(super) fn write(&self, data: &Bound<'_, PyBytes>) -> PyResult<()> {
        let py = data.py();
        let Some(transport) = self.get(py) else {
            return Ok(());
        };
        match self.direct(&transport) {
            InnerKind::Stream => stream::write(&transport, data),
            InnerKind::Tls => writing::write_collected(tls_of(&transport), data.as_any()),
            InnerKind::Foreign => transport.call_method1(intern!(py, "write"), (data,)).map(drop),
        }
    }

    /// Ends the connection now. `connection_lost` gets `exception`, unless the transport is a foreign one without
    /// `_force_close()`.
    pub(super) fn abort_with(&self, py: Python<'_>, exception: Option<Bound<'_, PyAny>>) -> PyResult<()> {
        let Some(transport) = self.get(py) else {
            return Ok(());
        };
        match self.direct(&transport) {
            InnerKind::Stream => stream::abort_with(&transport, exception),
            InnerKind::Tls => lifecycle::abort(tls_of(&transport), exception),
            InnerKind::Foreign => {
                // asyncio's transports have this method, and so have ours and many imitations.
                if let Some(force_close) = transport.getattr_opt(intern!(py, "_force_close"))? {
                    force_close.call1((exception,)).map(drop)
                } else {
                    transport.call_method0(intern!(py, "abort")).map(drop)
                }
            }
        }
    }

    pub(super) fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, "close")
    }

    pub(super) fn pause_reading(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, "pause_reading")
    }

    pub(super) fn resume_reading(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, "resume_reading")
    }

    pub(super) fn is_closing(&self, py: Python<'_>) -> PyResult<bool> {
        match self.get(py) {
            Some(transport) => transport.call_method0(intern!(py, "is_closing"))?.is_truthy(),
            None => Ok(false),
        }
    }

    fn call(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        match self.get(py) {
            Some(transport) => transport.call_method0(name).map(drop),
            None => Ok(()),
        }
    }

    /// The cell, for the collector.
    pub(super) fn cell(&self) -> &ObjectCell {
        &self.transport
    }
}

/// A copy of the context in which one of our transports calls its protocol; None for other transports, and after the
/// connection is lost.
pub(super) fn copied_context<'py>(transport: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    if stream::is_stream(transport) {
        stream::copied_context(transport)
    } else if is_tls(transport) {
        tls_of(transport).calls.copied_context(transport.py())
    } else {
        Ok(None)
    }
}

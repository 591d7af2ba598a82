#compdef finetune
# Completion of finetune in zsh, after compinit.

# Print the arguments of a command: "key=" with its values, or a word without a key. "/" means file names.
_finetune_words() {
    case $1 in
    @SETTINGS@
    esac
}

_finetune_values() {
    local name=${PREFIX%%=*}= line
    local -a values
    compset -P 1 '*='
    for line in "$@"; do
        [[ $line == $name* ]] && values=(${=line#$name})
    done
    (( ${values[(Ie)/]} )) && _files && result=0
    compadd -- ${values:#/} && result=0
}

# Add keys up to the next dot, so that a long list of keys is shown section by section.
_finetune_keys() {
    local line name rest
    local -aU keys words_without_key
    for line in "$@"; do
        if [[ $line == / ]]; then
            _files && result=0
        elif [[ $line == *=* ]]; then
            name=${line%%=*}=
            [[ $name == "$PREFIX"* ]] || continue
            rest=${name#"$PREFIX"}
            [[ $rest == *.* ]] && name=$PREFIX${rest%%.*}.
            keys+=($name)
        else
            words_without_key+=($line)
        fi
    done
    compadd -S '' -- $keys && result=0
    compadd -- $words_without_key && result=0
}

_finetune() {
    if (( CURRENT == 2 )); then
        compadd -- @COMMANDS@
        return
    fi
    local result=1
    local -a lines=("${(@f)$(_finetune_words $words[2])}")
    if [[ $PREFIX == *=* ]]; then
        _finetune_values "${lines[@]}"
    else
        _finetune_keys "${lines[@]}"
    fi
    return result
}

if [[ $funcstack[1] == _finetune ]]; then
    _finetune "$@"
else
    compdef _finetune finetune
fi
